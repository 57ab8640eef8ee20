#!/bin/bash
echo 'def perfect_shape(a): return a[-1] + max(a)' > ideal_node.py
