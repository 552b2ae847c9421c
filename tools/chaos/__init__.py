"""Injects faults while clients train and sample, and checks what the clients were promised: `python -m chaos`.

Clients (`client`) record their requests and answers (`history`). A `nemesis` disturbs the Fovea that they use (`stack`,
`links`) with a plan drawn from a seed (`faults`). The `checker` compares the answers with those of the same clients in
an undisturbed run, and the `inventory` compares what both runs leave behind.
"""
