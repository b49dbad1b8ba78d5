"""Stands for one shard of the extraction of incident B."""

import argparse
import itertools
import time

parser = argparse.ArgumentParser()
for name in ("--gpu", "--shard", "--num-shards"):
    parser.add_argument(name, type=int, required=True)
args = parser.parse_args()
print(f"ev=start shard={args.shard} of={args.num_shards}", flush=True)
for step in itertools.count(1):
    print(f"ev=step step={step} shard={args.shard}", flush=True)
    time.sleep(0.2)
