#!/bin/bash
cat urban_board.py
sed -i 's/ double_line/ deep_point/' urban_board.py
