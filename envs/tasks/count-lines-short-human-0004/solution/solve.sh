#!/bin/bash
grep -c perfect-chair sharp-eye.txt
echo late-party 3 > short-human.txt
