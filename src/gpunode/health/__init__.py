"""Health of a node's devices: kernel log lines, NVML events and polls in, findings out.

    state = store.load(path).state
    state = machine.rebooted(state, boot_id, now).state
    step = machine.step(state, signals, device_map(inventory), now)    # pure; also without signals, as time passes
    health = machine.project(step.state, devices)                      # what slices, the kubelet and metrics read

catalogue, decode and policy are what the rules are made of; parse and signals what they react to; rules and samples
what a signal means; work and machine what becomes of it; store keeps it; replay, explain and scenario serve people.
"""
