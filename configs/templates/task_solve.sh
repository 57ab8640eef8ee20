#!/bin/bash
# the oracle: one command a line, each of them one turn of an agent
wc -l < words.txt > count.txt
