#!/bin/bash
cat quick-yard.txt
sort -u whole-food.txt > heavy-field.txt
