#!/bin/bash
sort long-plane.txt > rough-scale.txt
