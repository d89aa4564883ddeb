// A library that is not a plug-in.

int model_library_without_model() {
  return 1;
}
