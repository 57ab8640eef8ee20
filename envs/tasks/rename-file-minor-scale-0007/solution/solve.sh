#!/bin/bash
mv perfect-beam.txt minor-scale.txt
mkdir -p fair-eye
cp minor-scale.txt fair-eye
