"""Collectors: each reads one section of a NodeSnapshot through a Host and judges nothing.

A collector module has ``collect(host) -> (section | None, gaps)`` and, where something moves,
``resample(host, section) -> (section, gaps)``, which appends a second reading to each device.
"""
