"""The paper's figures on beta: how many accepted and how many rejected updates are good, by the gate's threshold."""
