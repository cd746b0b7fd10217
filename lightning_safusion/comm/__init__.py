"""How a message crosses the network: wire formats, transports and costs."""
