# Prints the file behind each library of the driver's user space, or the library's name alone where it is not installed.
for name in libcuda.so.1 libnvidia-ml.so.1; do
  path=$(ldconfig -p | sed -n "s/^\s*$name (libc6,.*) => //p" | head -n 1)
  if [ "$path" ]; then readlink -f "$path"; else echo "$name"; fi
done
