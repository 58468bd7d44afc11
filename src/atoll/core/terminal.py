"""Who may use the terminal's last line: a program that asks the user something comes before our own moving line."""

import threading

# Held while another program may ask something there, such as ssh for a code.
prompts = threading.Lock()
