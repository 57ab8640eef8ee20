#!/bin/bash
grep -c civil-letter little-yard.txt
echo late-party 3 > cool-eye.txt
