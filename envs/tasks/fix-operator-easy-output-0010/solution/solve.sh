#!/bin/bash
cat easy_output.py
sed -i 's/ - / + /' easy_output.py
