#!/bin/bash
sed -i 's/ happy-chair/ red-flight/' upper-icon.txt
