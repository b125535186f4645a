"""Producers and one consumer: a fan-out of futures, then streams with back-pressure.

$ python -m mpiml.run -n 4 examples/producers.py
[consumer/0] sensor ... ready with offset ...
[consumer/0] sensor ... ready with offset ...
[consumer/0] sensor ... ready with offset ...
[consumer/0] 200 rounds of 3 readings, mean ..., sensors at most ... readings ahead

$ python -m mpiml.run --threads 2 examples/producers.py --rounds 50
[consumer/0] sensor ... ready with offset ...
[consumer/0] sensor ... ready with offset ...
[consumer/0] 50 rounds of 2 readings, mean ..., sensors at most ... readings ahead

A sensor that is ahead of the consumer stands at its `yield` until an item is taken.
"""

from concurrent.futures import as_completed

import numpy as np

import mpiml


class Sensor:
    def __init__(self, size):
        self.size = size
        self.offset = 0.0
        self.made = 0

    def calibrate(self):
        me = mpiml.context()
        self.offset = me.rng.normal(size=100_000).mean()
        return me.index, self.offset

    def readings(self, rounds):
        rng = mpiml.context().rng
        for _ in range(rounds):
            self.made += 1
            yield rng.normal(size=self.size) - self.offset  # (size,)

    def progress(self):
        return self.made


def consume(sensors, rounds):
    for future in as_completed(sensors.futures.calibrate()):
        index, offset = future.result()
        print(f"sensor {index} ready with offset {offset:.4f}")

    streams = [sensor.stream.readings(rounds) for sensor in sensors]
    mean, ahead = 0.0, 0
    for taken, readings in enumerate(zip(*streams, strict=True), start=1):
        mean += (np.mean(readings) - mean) / taken  # (sensors, size) -> ()
        if taken % 10 == 0:
            ahead = max(ahead, max(sensors.progress()) - taken)
    print(
        f"{taken} rounds of {len(sensors)} readings, mean {mean:.4f}, "
        f"sensors at most {ahead} readings ahead"
    )


def build(sensors: int = mpiml.FILL, rounds: int = 200, size: int = 10_000) -> mpiml.Program:
    program = mpiml.Program("producers")
    handles = program.add_node(
        mpiml.ServiceNode(Sensor, size), label="sensor", replicas=sensors
    )
    program.add_node(mpiml.PyNode(consume, handles, rounds), label="consumer")
    return program


if __name__ == "__main__":
    mpiml.launch(build)
