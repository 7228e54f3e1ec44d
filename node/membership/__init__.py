"""Who is here: greetings, pulses, silences, and this machine's own clocks."""
