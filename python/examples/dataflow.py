#!/usr/bin/env python3
"""Streams a large array through a small device, with the engine alone, and shows that ops overlap.

The host holds N tiles of the array; the device has room for BUFFERS of them. Three ops work on each
tile: the h2d stream copies the tile to the device, the compute stream runs a Python callable, and
the d2h stream copies the result to the host. The program says nothing of waits. The engine derives
them from the regions that each op reads and writes: tile i + BUFFERS is fetched when its buffer is
free.

    PYTHONPATH=python python python/examples/dataflow.py [timeline.json]
"""

import sys

import numpy as np
from penstock import Engine, Link, Place, Program, Region, Run, Space, Stream

N, BUFFERS, WIDTH, STEPS = 12, 3, 1 << 16, 4
DEVICE, HOST = 0, 1
COMPUTE, H2D, D2H = 0, 1, 2
TILE_BYTES = 4 * WIDTH


def scale(step: int, x: np.ndarray) -> None:
    """The compute op: x becomes 2 x + 1, in place."""
    np.multiply(x, 2, out=x)
    np.add(x, 1, out=x)


def build() -> Program:
    """One step: every tile goes through the device once."""
    program = Program(n_spaces=2, n_streams=3)
    for i in range(N):
        on_host = Region(HOST, i * TILE_BYTES, WIDTH, "f4")
        buffer = Region(DEVICE, (i % BUFFERS) * TILE_BYTES, WIDTH, "f4")
        program.copy(H2D, on_host, buffer, chunk=i)
        program.call(COMPUTE, scale, updates=[buffer], chunk=i)
        program.copy(D2H, buffer, on_host, chunk=i)
    return program


def main(timeline: str | None = None) -> np.ndarray:
    schedule = build().compile()
    print(
        f"{schedule.n_ops} ops, {schedule.n_waits} waits; the device needs "
        f"{schedule.space_bytes(DEVICE)} bytes, "
        f"the host {schedule.space_bytes(HOST)}"
    )
    print(
        "op 9 (which fetches tile 3 into the buffer of tile 0) waits for",
        schedule.op(9)["waits"],
        "= (stream, steps back, value)",
    )

    places = [Place("device"), Place("host")]
    links = [Link(HOST, DEVICE, stream=H2D), Link(DEVICE, HOST, stream=D2H)]
    spaces = [Space(schedule.space_bytes(place), place) for place in (DEVICE, HOST)]
    streams = [Stream(name, DEVICE) for name in ("compute", "h2d", "d2h")]
    with Engine(spaces, streams, places, links) as engine:
        tiles = engine.array(Region(HOST, 0, (N, WIDTH), "f4"))
        tiles[:] = np.arange(N, dtype=np.float32)[:, None]
        with Run(engine, schedule, trace_steps=1) as run:
            run.submit(STEPS)
            run.wait()
            trace = run.trace()
        result = tiles[:, 0].copy()
    busy = np.zeros(len(streams))
    np.add.at(busy, trace["stream"], (trace["end_ns"] - trace["start_ns"]).astype(float))
    window = trace["end_ns"].max() - trace["start_ns"].min()
    for stream, ns in zip(streams, busy):
        print(f"{stream.name:8} busy {100 * ns / window:5.1f}% of a step")
    if timeline:
        schedule.write_trace(timeline, trace, [s.name for s in streams])
    print("first element of each tile after", STEPS, "steps:", result)
    return result


if __name__ == "__main__":
    main(*sys.argv[1:])
