question = 'What does a mistake look like?'
# Mistakes that everyone makes once, beside a healthy run: you can tell them by their curves.
#   python bench.py config/lab.py config/lab_museum.py --dataset=my_text.txt
what = 'compare'
out_dir = 'out/lab_museum'
picture = 'curves'
seeds = 1
variants = f'''
healthy:
no zero_grad: config/broken_no_zero_grad.py
constant embedding: config/broken_constant_embedding.py
no causal mask: config/broken_no_mask.py
targets not shifted: config/broken_no_shift.py
rate x 100: --learning_rate={100 * learning_rate:g}
float16 without scaling: --dtype=float16 config/broken_no_scale.py
'''
