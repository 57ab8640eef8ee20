#!/bin/bash
mv rare-stream.txt safe-market.txt
sort blue-pack.txt > plastic-school.txt
