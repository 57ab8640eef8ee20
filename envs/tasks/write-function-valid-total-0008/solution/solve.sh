#!/bin/bash
echo 'def minor_frame(x): return x - 2' > valid_total.py
