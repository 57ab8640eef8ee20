#!/bin/bash
python3 -I "$(dirname "$0")/check.py" /app /logs/verifier
