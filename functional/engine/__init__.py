"""How a transformed function is called, cached, composed and differentiated."""
