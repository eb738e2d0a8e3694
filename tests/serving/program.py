"""Reads a compiled program's HLO text and says what its loop writes."""

import re

FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "while", "conditional", "call"}


def computations(hlo: str) -> dict[str, list[str]]:
    """Name -> instruction lines of every computation."""
    found, name = {}, None
    for line in hlo.splitlines():
        head = re.match(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$", line)
        if head:
            name = head[1]
            found[name] = []
        elif name and " = " in line:
            found[name].append(line.strip())
    return found


def operation(line: str) -> tuple[str, str]:
    """The output type and the operation of an instruction line."""
    match = re.search(r"= (\(.*?\)|\S+) ([\w\-]+)\(", line)
    assert match, line
    return match[1], match[2]


def loop_bodies(hlo: str) -> list[str]:
    """Names of the bodies of all while loops."""
    return re.findall(r" while\(.*body=%([\w.\-]+)", hlo)


def written_in_loops(hlo: str, shape: tuple[int, ...]) -> list[str]:
    """Instructions in loops, but outside conditionals, that output an array whose last dimensions are `shape`.

    A fusion counts by what it outputs: inside it nothing is written to memory. Tuples, and what only passes a buffer
    on, are no writes.
    """
    all_lines, flagged = computations(hlo), []
    wanted = re.compile(r"\[(?:\d+,)*" + ",".join(map(str, shape)) + r"\]")

    def visit(name):
        for line in all_lines[name]:
            kind, name_of = operation(line)
            if name_of not in FREE and wanted.search(kind):
                flagged.append(line)
            if name_of in ("while", "call"):
                for inner in re.findall(r"(?:body|to_apply)=%([\w.\-]+)", line):
                    visit(inner)

    bodies = loop_bodies(hlo)
    assert bodies, "the program has no loop"
    for body in bodies:
        visit(body)
    return flagged
