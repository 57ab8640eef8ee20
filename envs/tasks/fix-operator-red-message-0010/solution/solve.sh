#!/bin/bash
cat red_message.py
sed -i 's/ - / + /' red_message.py
