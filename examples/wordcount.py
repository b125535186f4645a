"""MapReduce: counts words of text files.

Mappers split files into words and hand each word to the reducer that counts it, which
`stable_hash` tells: Python's own hash of a string differs from process to process.

$ python -m mpiml.run -n 6 examples/wordcount.py
[driver/0] 3 files, 3 mappers, 2 reducers, 511 words
[driver/0]   27 the
[driver/0]   20 of
[driver/0]   15 it
[driver/0]   15 that
[driver/0]   14 we

$ python -m mpiml.run examples/wordcount.py --mappers 2 --reducers 3 --top 3
[driver/0] 3 files, 2 mappers, 3 reducers, 511 words
[driver/0]   27 the
[driver/0]   20 of
[driver/0]   15 it
"""

import re
from collections import Counter
from pathlib import Path

import mpiml

DATA = Path(__file__).parent / "data"


class Mapper:
    def __init__(self, reducers):
        self.reducers = reducers

    def map(self, path):
        parts = [Counter() for _ in self.reducers]
        for word in re.findall(r"[a-z']+", path.read_text().lower()):
            parts[mpiml.stable_hash(word) % len(parts)][word] += 1
        mpiml.gather(
            [r.futures.reduce(part) for r, part in zip(self.reducers, parts, strict=True)]
        )


class Reducer:
    def __init__(self):
        self.counts = Counter()

    def reduce(self, counts):
        self.counts.update(counts)

    def total(self):
        return self.counts.total()

    def top(self, n):
        return sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))[:n]


def drive(mappers, reducers, folder, top):
    files = sorted(folder.glob("*.txt"))
    mpiml.gather([mappers[i % len(mappers)].futures.map(file) for i, file in enumerate(files)])
    words = sum(reducers.total())
    print(
        f"{len(files)} files, {len(mappers)} mappers, {len(reducers)} reducers, {words} words"
    )
    found = [item for part in reducers.top(top) for item in part]
    for word, count in sorted(found, key=lambda item: (-item[1], item[0]))[:top]:
        print(f"{count:4d} {word}")


def build(
    folder: Path = DATA, mappers: int = mpiml.FILL, reducers: int = 2, top: int = 5
) -> mpiml.Program:
    program = mpiml.Program("word count")
    counting = program.add_node(mpiml.ServiceNode(Reducer), label="reducer", replicas=reducers)
    mapping = program.add_node(
        mpiml.ServiceNode(Mapper, counting), label="mapper", replicas=mappers
    )
    program.add_node(mpiml.PyNode(drive, mapping, counting, folder, top), label="driver")
    return program


if __name__ == "__main__":
    mpiml.launch(build)
