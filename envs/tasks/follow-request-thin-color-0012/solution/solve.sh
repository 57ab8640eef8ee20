#!/bin/bash
cat modern-clock.txt
echo 'def soft_point(z): return direct_field(z) + 17' >> thin_color.py
