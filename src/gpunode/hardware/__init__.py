"""The machine under the agent: NVML, sysfs, /proc and the kernel log, real or fake, behind one code path."""
