"""Plans by propagation: from the layouts of inputs, operation by operation, by order of precedence."""
