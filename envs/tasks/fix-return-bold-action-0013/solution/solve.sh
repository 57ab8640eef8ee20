#!/bin/bash
cat valid_board.py
sed -i 's/: x/: return x/' valid_board.py
echo 'def green_output(x): return x + 3' > bold_action.py
