"""The protocol of `tandem.reward.workers.model_process` without a model: an answer scores its length, or misbehaves."""

from __future__ import annotations

import json
import os
import signal
import socket
import time


def main(descriptor: int, parent: int) -> None:
    channel = socket.socket(fileno=descriptor)
    lines = channel.makefile("r", encoding="utf-8", newline="\n")

    def say(message: object) -> None:
        channel.sendall(json.dumps(message).encode() + b"\n")

    setup = json.loads(lines.readline())
    if setup["path"] == "unloadable":
        say({"error": "it is broken"})
        return
    if setup["path"] == "dies":
        os._exit(3)
    say({"ready": True})
    for line in lines:
        questions = json.loads(line)["questions"]
        say({"working": [question["id"] for question in questions]})
        size = setup["batch"]
        for start in range(0, len(questions), size):
            if start:
                say({"next": True})
                if not json.loads(lines.readline())["continue"]:
                    break
            batch = questions[start : start + size]
            say({"working": [question["id"] for question in batch]})
            for question in batch:
                behave(question["answer"])
            say({"scores": [[question["id"], len(question["answer"])] for question in batch]})
        say({"done": True})


def behave(answer: str) -> None:
    if answer.startswith("hang"):
        time.sleep(600)
    if answer.startswith("die"):
        print("out of luck", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if answer.startswith("babble"):
        print("x" * 300_000, flush=True)
