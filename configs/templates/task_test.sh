#!/bin/bash
# runs in a sandbox of its own; writes reward.txt and, as proof that tests ran, ctrf.json
python3 -I "$(dirname "$0")/check.py" /app /logs/verifier
