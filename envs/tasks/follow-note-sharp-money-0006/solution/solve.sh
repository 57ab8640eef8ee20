#!/bin/bash
cat soft-player.txt
sort -u tiny-world.txt > sharp-money.txt
