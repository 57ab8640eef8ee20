#!/bin/bash
grep equal-bed empty-foot.txt
grep equal-bed slow-song.txt
echo social-stage > prime-office.txt
