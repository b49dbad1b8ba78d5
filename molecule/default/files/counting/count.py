"""A job that works for as long as it is let: one step, one line, every half second."""

import itertools
import time

print("counting begins")
for step in itertools.count(1):
    print(f"step={step}")
    time.sleep(0.5)
