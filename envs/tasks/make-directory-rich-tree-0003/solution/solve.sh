#!/bin/bash
mkdir -p rich-tree/home
cp major-glass.txt rich-tree/home
