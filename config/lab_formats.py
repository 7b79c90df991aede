# What does half the memory cost? The same training in float32, bfloat16, and float16 with and without scaling of the loss.
#   python bench.py config/lab.py config/lab_formats.py --dataset=my_text.txt
what = 'compare'
out_dir = 'out/lab_formats'
arms = '''
float32: --dtype=float32
bfloat16: --dtype=bfloat16
float16: --dtype=float16
float16 without scaling: --dtype=float16 config/broken_no_scale.py
'''
