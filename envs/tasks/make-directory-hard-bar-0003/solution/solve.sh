#!/bin/bash
mkdir -p hard-bar/data
cp major-glass.txt hard-bar/data
