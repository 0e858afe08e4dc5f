"""The wizard and the monitor: what a person sees in the terminal. No decision is taken here."""
