"""What torch allocates in host memory, by phase.

A process's resident size is mostly libraries, and never falls. torch's profiler sees every
allocation as it is made and freed, so that it tells what a device's allocator would: the highest
sum of the tensors that live at a time. What was allocated before is not seen when it is freed.
"""

from __future__ import annotations

from collections import defaultdict

from torch.profiler import ProfilerActivity, profile, record_function

MARK = "flowrl.phase:"
OTHER = "other"  # between phases
MEMORY = "[memory]"  # the profiler's name of an allocation


class Allocations:
    """Counts from `start` to `peaks`; one at a time in a process."""

    running: profile | None = None

    def start(self) -> None:
        """Count from here on; what was counted is forgotten."""
        self.stop()
        Allocations.running = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        Allocations.running.start()

    def enter(self, phase: str) -> None:
        """What follows belongs to a phase."""
        if Allocations.running is not None:
            with record_function(MARK + phase):
                pass

    def stop(self) -> profile | None:
        """Count no more -> what was counted."""
        found, Allocations.running = Allocations.running, None
        if found is not None:
            found.stop()
        return found

    def peaks(self) -> dict[str, int]:
        """Phase -> the most bytes that lived in it, above what lived at the start; counting
        ends. What lies between phases is
        "other"."""
        found = self.stop()
        if found is None:
            return {}
        moments = [
            (event.start_ns(), event.name(), event.nbytes() if event.name() == MEMORY else 0)
            for event in found.profiler.kineto_results.events()
            if event.name() == MEMORY or event.name().startswith(MARK)
        ]
        peaks: dict[str, int] = defaultdict(int)
        phase, live = OTHER, 0
        for _, name, nbytes in sorted(moments, key=lambda moment: moment[0]):
            if name != MEMORY:
                phase = name.removeprefix(MARK)
            live += nbytes
            peaks[phase] = max(peaks[phase], live)
        return dict(peaks)
