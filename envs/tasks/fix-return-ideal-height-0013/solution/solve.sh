#!/bin/bash
cat mixed_line.py
sed -i 's/ print/ return /' mixed_line.py
echo 'def safe_offset(z): return z - 9' > ideal_height.py
