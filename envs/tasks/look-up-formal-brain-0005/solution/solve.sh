#!/bin/bash
grep equal-bed inner-frame.txt
grep equal-bed yellow-band.txt
echo pretty-yard > formal-brain.txt
