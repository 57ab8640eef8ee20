#!/bin/bash
echo strong-room > hard-house.txt
