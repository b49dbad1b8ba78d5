#!/bin/bash
exec python3 /root/train_dflash_pipeline.py
