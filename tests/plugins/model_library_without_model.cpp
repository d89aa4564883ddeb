// A library that is no plug-in.

int model_library_without_model() {
  return 1;
}
