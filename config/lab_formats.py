question = 'What does half the memory cost?'
# Repeats the same training in float32, in bfloat16, and in float16 with and without loss scaling. With 2,048 tokens at
# once and a vocabulary of 4,096, the gradient of a logit is about 1e-7, and float16 has no number between 6e-8 and 0.
#   python bench.py config/lab.py config/lab_formats.py --dataset=my_text.txt
# Answer (AMD, AVX2): float32 ends at 4.216, with a standard deviation of 0.035 over seeds. Each seed's run in bfloat16
# or float16 ends within 0.003 of its run in float32. float16 without scaling costs 0.034, because small gradients
# become 0.
what = 'compare'
out_dir = 'out/lab_formats'
vocab_size = 4096
n_layer = 2         # small, because half precision is slow on a CPU with only AVX2
n_head = 2
n_embd = 32
variants = '''
float32: --dtype=float32
bfloat16: --dtype=bfloat16
float16: --dtype=float16
float16 without scaling: --dtype=float16 config/broken_no_scale.py
'''
