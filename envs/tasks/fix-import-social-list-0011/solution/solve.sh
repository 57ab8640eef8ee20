#!/bin/bash
cat fresh_column.py
sed -i 's/ dry_area/ social_list/' fresh_column.py
