#!/bin/bash
sort long-plane.txt > raw-road.txt
