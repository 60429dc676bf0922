"""Many runs and what they say together: comparisons, sweeps, matching, intervals, verdict and report.

May import every other room.
"""

from tied_lm.door import door

__all__, __getattr__, __dir__ = door(
    __name__,
    {
        "plan": "Arm Plan",
        "sweep": "Sweep",
        "summary": "summarize_comparison",
        "verdict": "conclusions",
        "report": "write_report",
    },
)
