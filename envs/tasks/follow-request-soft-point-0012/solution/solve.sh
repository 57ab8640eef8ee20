#!/bin/bash
cat formal-frame.txt
echo 'def direct_field(z): return young_project(z) + 20' >> soft_point.py
