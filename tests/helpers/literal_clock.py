"""A clock written out as an event simulation: one event after the other, in plain Python, from the text of the docs.

`duration(round, client, start)` says how many seconds a client needs (infinite if it never answers), `is_there(client,
time)` whether it is there, `choose(round, draw, candidates, number)` whom the server draws.
"""

import math


def synchronous(rounds, clients, wanted, asked, deadline, duration, is_there, choose):
    """One tuple a round: counted clients, how many were asked, and the time after it."""
    now, out = 0.0, []
    for round in range(1, rounds + 1):
        called = choose(round, 0, [c for c in clients if is_there(c, now)], asked)
        answers = []
        for client in called:
            seconds = duration(round, client, 0)
            if seconds <= deadline and is_there(client, now + seconds):
                answers.append((seconds, client))
        answers.sort()
        counted = answers[:wanted]
        if len(counted) < min(wanted, len(called)) or not called:
            now = now + deadline
        else:
            now = now + max(seconds for seconds, _ in counted)
        out.append((sorted(client for _, client in counted), len(called), now))
    return out


def buffered(rounds, clients, wanted, concurrency, deadline, duration, is_there, choose):
    """One tuple a round: counted clients with the round in which each started, how many started, and the time."""
    now, out, number = 0.0, [], 0
    working, buffer = [], []  # [(moment, number of the start, client, round, whether it arrives)]
    for round in range(1, rounds + 1):
        draw, asked, starts = 0, 0, dict.fromkeys(clients, 0)
        while len(buffer) < wanted:
            while len(working) < concurrency:  # draw once, for all who are missing
                busy = [event[2] for event in working + buffer]
                free = [c for c in clients if c not in busy and is_there(c, now)]
                for client in choose(round, draw, free, concurrency - len(working)):
                    seconds = duration(round, client, starts[client])
                    starts[client] += 1
                    asked += 1
                    arrives = seconds <= deadline and is_there(client, now + seconds)
                    working.append((now + (seconds if arrives else deadline), number, client, round, arrives))
                    number += 1
                draw += 1
                break
            if not working:
                now = next_stretch(now, is_there)
                continue
            now = min(event[0] for event in working)
            for event in sorted(working):
                if event[0] == now:
                    working.remove(event)
                    if event[4]:
                        buffer.append(event)
        counted, buffer = buffer[:wanted], buffer[wanted:]
        out.append((sorted((client, started) for _, _, client, started, _ in counted), asked, now))
    return out


def next_stretch(now, is_there):
    return (math.floor(now / is_there.seconds) + 1) * is_there.seconds
