"""Penstock and its peers, side by side: `make bench-peers`, or `python -m bench.compare`.

    subjects   who is compared, and what a confirmation of each one means
    works      what is done
    rounds     the run: every server once, then all of them again
    scenes     what needs a server of its own: a backlog, a crash, many connections, many queues
    cost       system calls and allocations a message, of Penstock
    results    what was measured
    goals      what should be reached, and whether it is
    tables     the figures as tables; `chart` as a picture; `page` as docs/benchmarks.md

The rules, for everybody alike:

* One load generator in C (bench/loadgen) drives every server over its own wire, from this machine, over TCP
  on 127.0.0.1. Every message carries its number; the generator fails where one is missing, damaged or comes
  twice, and a run that fails gives no figure.
* One server at a time, started with an empty folder on a real disk for each round. Rounds are interleaved:
  everybody once, then everybody again, so that a machine that changes its mind does so for all. The figure
  is the median of three rounds. Before the first run of a round each wire carries some messages that do not
  count.
* One producer connection sends without waiting, with at most 5,000 messages (and 16 MiB) that are not
  confirmed, on the wires that confirm. SSPQ and PHPMQ confirm nothing: there the server's back-pressure is
  the window. "Confirmed" is whatever the setting promises; `subjects` has a sentence for each.
* One consumer connection has up to 500 messages in flight and acknowledges each one by itself.
* CPU is user and system time of all processes of the server (Penstock: both; RabbitMQ: beam, its children
  and epmd) until it is quiet again, by message. Nothing is pinned: server and generator run where the
  kernel puts them.
* Latency counts from the moment when a message was due to be sent (no coordinated omission), 2,000 a
  second.
* Peers have the settings that make them faster where they promise the same: Redis rewrites no file and
  takes no snapshots, its streams and NATS's keep what is acknowledged.
* A peer that fails is named in the report and left out. Penstock may not fail."""
