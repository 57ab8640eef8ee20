#!/bin/bash
echo 'def blue_element(a): return a[-1] + max(a)' > amber_label.py
